/* Bilinear resizing with antialias, of bytes, as torch computes it on a CPU
   (aten/src/ATen/native/cpu/UpSampleKernel.cpp and UpSampleKernelAVXAntialias.h, which are after
   Pillow's Resample.c): weights are rounded to 16 bits, and each pass to 8. */

#include "internal.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The weights of one output pixel; returns how many, from input `*first` on. */
static int32_t weigh(int32_t in, double scale, int32_t output, double *weights, int32_t *first) {
  double support = scale >= 1.0 ? scale : 1.0;
  double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
  double centre = scale * (output + 0.5);
  int32_t begin = (int32_t)(centre - support + 0.5);
  int32_t end = (int32_t)(centre + support + 0.5);
  double sum = 0.0;
  if (begin < 0) begin = 0;
  if (end > in) end = in;
  for (int32_t i = begin; i < end; i++) {
    double distance = fabs((i - centre + 0.5) * inverse);
    weights[i - begin] = distance < 1.0 ? 1.0 - distance : 0.0;
    sum += weights[i - begin];
  }
  for (int32_t i = begin; i < end; i++) weights[i - begin] /= sum;
  *first = begin;
  return end - begin;
}

int make_axis(struct buffer *memory, int32_t in, int32_t out, int32_t keep, int32_t count,
              struct axis *axis) {
  double scale = (double)in / out;
  int32_t taps = (int32_t)ceil(scale >= 1.0 ? scale : 1.0) * 2 + 1;
  taps += taps & 1;
  /* `in` and `out` are at most MOST_SIDE, and count at most out: count * taps is below 2^19. */
  size_t cells = (size_t)count * taps;
  size_t bytes = (cells + taps) * sizeof(double) + 2 * (size_t)count * sizeof(int32_t) +
                 cells * sizeof(int16_t);
  double *exact = need(memory, bytes);
  if (exact == NULL) return 0;
  double *others = exact + cells; /* of pixels that are not kept */
  axis->count = count;
  axis->taps = taps;
  axis->first = (int32_t *)(others + taps);
  axis->inputs = axis->first + count;
  axis->weights = (int16_t *)(axis->inputs + count);
  double largest = 0.0; /* of all outputs: it decides how the weights are rounded */
  for (int32_t output = 0; output < out; output++) {
    int kept = output >= keep && output < keep + count;
    double *weights = kept ? exact + (size_t)(output - keep) * taps : others;
    int32_t first;
    int32_t inputs = weigh(in, scale, output, weights, &first);
    for (int32_t i = 0; i < inputs; i++)
      if (weights[i] > largest) largest = weights[i];
    if (kept) {
      axis->first[output - keep] = first;
      axis->inputs[output - keep] = inputs;
    }
  }
  /* The most bits with which the largest weight fits. */
  int32_t precision = 0;
  while (precision < 22 && (int32_t)(0.5 + largest * (1 << (precision + 1))) < (1 << 15))
    precision++;
  axis->precision = precision;
  memset(axis->weights, 0, cells * sizeof(int16_t));
  for (int32_t output = 0; output < count; output++)
    for (int32_t i = 0; i < axis->inputs[output]; i++) {
      size_t cell = (size_t)output * taps + i;
      axis->weights[cell] = (int16_t)(0.5 + exact[cell] * (1 << precision));
    }
  return 1;
}

static uint8_t to_byte(int32_t value) {
  if (value < 0) return 0;
  return (uint8_t)(value > 255 ? 255 : value);
}

static void resize_row_c(const uint8_t *row, int32_t skipped, const struct axis *axis, int flip,
                         uint8_t *to) {
  int32_t half = 1 << (axis->precision - 1);
  for (int32_t output = 0; output < axis->count; output++) {
    const uint8_t *in = row + 4 * (size_t)(axis->first[output] + skipped);
    const int16_t *weights = axis->weights + (size_t)output * axis->taps;
    int32_t sums[3] = {half, half, half};
    for (int32_t i = 0; i < axis->inputs[output]; i++)
      for (int c = 0; c < 3; c++) sums[c] += in[4 * i + c] * weights[i];
    uint8_t *pixel = to + 4 * (size_t)(flip ? axis->count - 1 - output : output);
    for (int c = 0; c < 3; c++) pixel[c] = to_byte(sums[c] >> axis->precision);
    pixel[3] = 0;
  }
}

static void sum_rows_c(const uint8_t *rows, size_t stride, int32_t inputs, const int16_t *weights,
                       int32_t precision, size_t bytes, uint8_t *to) {
  for (size_t x = 0; x < bytes; x++) {
    int32_t sum = 1 << (precision - 1);
    for (int32_t i = 0; i < inputs; i++) sum += rows[i * stride + x] * weights[i];
    to[x] = to_byte(sum >> precision);
  }
}

static void pack_row_c(const uint8_t *row, int32_t count, uint8_t *to) {
  for (int32_t i = 0; i < count; i++) memcpy(to + 3 * (size_t)i, row + 4 * (size_t)i, 3);
}

static const struct kernels PLAIN_C = {resize_row_c, sum_rows_c, pack_row_c};

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2")))

/* Two weights, for a multiplication of pairs. */
static int32_t two_weights(const int16_t *weights) {
  int32_t both;
  memcpy(&both, weights, sizeof both);
  return both;
}

AVX2 static void resize_row_avx2(const uint8_t *row, int32_t skipped, const struct axis *axis,
                                 int flip, uint8_t *to) {
  const __m128i half = _mm_set1_epi32(1 << (axis->precision - 1));
  const __m128i shift = _mm_cvtsi32_si128(axis->precision);
  /* Two pixels of 4 bytes to 4 pairs of 16 bits, a pair for each colour. */
  const __m128i pairs = _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1);
  const __m256i pairs_twice = _mm256_broadcastsi128_si256(pairs);
  for (int32_t output = 0; output < axis->count; output++) {
    const uint8_t *in = row + 4 * (size_t)(axis->first[output] + skipped);
    const int16_t *weights = axis->weights + (size_t)output * axis->taps;
    int32_t inputs = axis->inputs[output];
    int32_t i = 0;
    __m128i sum = half;
    if (inputs >= 4) {
      __m256i sums = _mm256_setzero_si256();
      for (; i + 4 <= inputs; i += 4) {
        __m128i four = _mm_loadu_si128((const __m128i *)(in + 4 * (size_t)i));
        __m256i apart = _mm256_permute4x64_epi64(_mm256_castsi128_si256(four), 0x50);
        __m128i low = _mm_set1_epi32(two_weights(weights + i));
        __m128i high = _mm_set1_epi32(two_weights(weights + i + 2));
        __m256i of_each = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        apart = _mm256_shuffle_epi8(apart, pairs_twice);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(apart, of_each));
      }
      __m128i two = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
      sum = _mm_add_epi32(sum, two);
    }
    for (; i < inputs; i += 2) { /* behind the last input the weight is 0 */
      __m128i two = _mm_loadl_epi64((const __m128i *)(in + 4 * (size_t)i));
      __m128i of_each = _mm_set1_epi32(two_weights(weights + i));
      sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_shuffle_epi8(two, pairs), of_each));
    }
    sum = _mm_sra_epi32(sum, shift);
    sum = _mm_packs_epi32(sum, sum);
    sum = _mm_packus_epi16(sum, sum);
    int32_t pixel = _mm_cvtsi128_si32(sum);
    memcpy(to + 4 * (size_t)(flip ? axis->count - 1 - output : output), &pixel, sizeof pixel);
  }
}

AVX2 static void sum_rows_avx2(const uint8_t *rows, size_t stride, int32_t inputs,
                               const int16_t *weights, int32_t precision, size_t bytes,
                               uint8_t *to) {
  const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
  const __m128i shift = _mm_cvtsi32_si128(precision);
  for (size_t x = 0; x < bytes; x += 16) {
    const uint8_t *column = rows + x;
    __m256i low = half;
    __m256i high = half;
    for (int32_t i = 0; i < inputs; i += 2) { /* two rows at a time */
      __m128i upper = _mm_loadu_si128((const __m128i *)(column + (size_t)i * stride));
      __m128i lower = _mm_setzero_si128();
      if (i + 1 < inputs)
        lower = _mm_loadu_si128((const __m128i *)(column + (size_t)(i + 1) * stride));
      __m256i of_each = _mm256_set1_epi32(two_weights(weights + i));
      __m256i first = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(upper, lower));
      __m256i second = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(upper, lower));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(first, of_each));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(second, of_each));
    }
    __m256i words = _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    __m128i sixteen =
        _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)(to + x), sixteen);
  }
}

AVX2 static void pack_row_avx2(const uint8_t *row, int32_t count, uint8_t *to) {
  const __m128i of_four = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
  int32_t i = 0;
  /* 16 bytes are written, of which 12 count: 6 pixels must be left. */
  for (; i + 6 <= count; i += 4) {
    __m128i four = _mm_loadu_si128((const __m128i *)(row + 4 * (size_t)i));
    _mm_storeu_si128((__m128i *)(to + 3 * (size_t)i), _mm_shuffle_epi8(four, of_four));
  }
  pack_row_c(row + 4 * (size_t)i, count - i, to + 3 * (size_t)i);
}

static const struct kernels WITH_AVX2 = {resize_row_avx2, sum_rows_avx2, pack_row_avx2};

const struct kernels *kernels(int plain_c) {
  return !plain_c && __builtin_cpu_supports("avx2") ? &WITH_AVX2 : &PLAIN_C;
}

#else

const struct kernels *kernels(int plain_c) {
  (void)plain_c;
  return &PLAIN_C;
}

#endif
