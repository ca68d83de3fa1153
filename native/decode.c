/* Decodes the rows and columns of a JPEG that a crop needs, and resizes them, by libjpeg-turbo. */

#include "internal.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

/* Decoded columns beside those that are needed: the first and the last one that libjpeg decodes have
   colours of their own, since it smooths colours between neighbours. */
#define MARGIN 2
#define ROWS 16  /* decoded at a time */
#define BEHIND 64 /* bytes behind a row that may be read */

struct distdl_scratch {
  struct buffer across, down, pixels;
};

int32_t distdl_native_version(void) { return DISTDL_NATIVE_VERSION; }

int32_t distdl_native_measures(void) { return DISTDL_ONLY_ENTROPY | DISTDL_ONLY_PIXELS; }

struct distdl_scratch *distdl_scratch_new(void) {
  return calloc(1, sizeof(struct distdl_scratch));
}

void distdl_scratch_free(struct distdl_scratch *scratch) {
  if (scratch == NULL) return;
  free(scratch->across.bytes);
  free(scratch->down.bytes);
  free(scratch->pixels.bytes);
  free(scratch);
}

void *need(struct buffer *buffer, size_t size) {
  if (size > DISTDL_MOST_BYTES) return NULL;
  if (buffer->size < size) {
    size_t whole = (size + size / 4 + 63) & ~(size_t)63;
    free(buffer->bytes);
    buffer->bytes = aligned_alloc(64, whole);
    buffer->size = buffer->bytes == NULL ? 0 : whole;
  }
  return buffer->bytes;
}

/* libjpeg's state, and where its errors lead. */
struct decoder {
  struct jpeg_decompress_struct info;
  struct jpeg_error_mgr errors;
  jmp_buf failed;
};

static void fail(j_common_ptr info) {
  longjmp(((struct decoder *)info->client_data)->failed, 1);
}

/* A warning means that bytes are missing or wrong, and that libjpeg would go on with pixels of its
   own invention. Below 0: a warning; others only tell. */
static void fail_on_warning(j_common_ptr info, int level) {
  if (level < 0) fail(info);
}

static void say_nothing(j_common_ptr info) { (void)info; }

/* Whether a crop lies in the image, and within the limits of `make_axis`. */
static int fits(const struct distdl_crop *crop, const struct header *header) {
  if (crop->top < 0 || crop->left < 0 || crop->height < 1 || crop->width < 1) return 0;
  if (crop->height > header->height - crop->top) return 0;
  if (crop->width > header->width - crop->left) return 0;
  if (crop->to_height < 1 || crop->to_height > MOST_SIDE) return 0;
  if (crop->to_width < 1 || crop->to_width > MOST_SIDE) return 0;
  if (crop->size < 1 || crop->keep_top < 0 || crop->keep_left < 0) return 0;
  if (crop->size > crop->to_height || crop->size > crop->to_width) return 0;
  return crop->keep_top <= crop->to_height - crop->size &&
         crop->keep_left <= crop->to_width - crop->size;
}

static int32_t last_input(const struct axis *axis) {
  return axis->first[axis->count - 1] + axis->inputs[axis->count - 1];
}

/* Decodes with a header that `read_header` has accepted, and axes of a crop that fits it. What is
   used after an error is in `decoder`: longjmp leaves local variables undefined. */
static int decode(struct decoder *decoder, struct buffer *pixels, const uint8_t *file,
                  size_t length, const struct header *header, const struct distdl_crop *crop,
                  const struct axis *across, const struct axis *down, int32_t flags,
                  uint8_t *out) {
  struct jpeg_decompress_struct *info = &decoder->info;
  const struct kernels *use = kernels(flags & DISTDL_PLAIN_C);
  /* What is needed of the image. */
  int32_t top = crop->top + down->first[0];
  int32_t bottom = crop->top + last_input(down);
  int32_t left = crop->left + across->first[0];
  int32_t right = crop->left + last_input(across);
  int resizes = !(flags & (DISTDL_ONLY_ENTROPY | DISTDL_ONLY_PIXELS));
  if (flags & DISTDL_ONLY_ENTROPY) bottom = top = 0; /* all rows are passed over */

  info->err = jpeg_std_error(&decoder->errors);
  info->client_data = decoder;
  decoder->errors.error_exit = fail;
  decoder->errors.emit_message = fail_on_warning;
  decoder->errors.output_message = say_nothing;
  if (setjmp(decoder->failed)) return DISTDL_BROKEN;
  jpeg_create_decompress(info);
  jpeg_mem_src(info, (unsigned char *)file, (unsigned long)length);
  jpeg_read_header(info, TRUE);
  int expected = header->components == 1 ? JCS_GRAYSCALE : JCS_YCbCr;
  if ((int)info->jpeg_color_space != expected || info->progressive_mode || info->arith_code ||
      info->image_height != (JDIMENSION)header->height ||
      info->image_width != (JDIMENSION)header->width || jpeg_has_multiple_scans(info))
    return DISTDL_NOT_PLAIN;
  info->out_color_space = JCS_EXT_RGBX;
  info->dct_method = JDCT_ISLOW;
  info->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(info);
  JDIMENSION begin = 0;
  JDIMENSION columns = info->output_width;
  if (left > MARGIN || right < header->width - MARGIN) {
    int32_t end = right < header->width - MARGIN ? right + MARGIN : header->width;
    begin = (JDIMENSION)(left > MARGIN ? left - MARGIN : 0);
    columns = (JDIMENSION)end - begin;
    jpeg_crop_scanline(info, &begin, &columns); /* widens them to whole blocks */
  }

  /* Some decoded rows; all rows resized across; one resized down as well. With rows aligned to 32
     bytes libjpeg-turbo writes past the cache, from which they are read next: hence 8 bytes. */
  size_t decoded = (((size_t)columns * 4 + BEHIND + 63) & ~(size_t)63) + 64;
  size_t resized = ((size_t)crop->size * 4 + 63) & ~(size_t)63;
  size_t between = (size_t)(bottom - top) * resized;
  uint8_t *memory = need(pixels, ROWS * decoded + 64 + between + resized);
  if (memory == NULL) return DISTDL_TOO_LARGE;
  uint8_t *middle = memory + ROWS * decoded + 64;
  uint8_t *last = middle + between;
  JSAMPROW rows[ROWS];
  for (int i = 0; i < ROWS; i++) rows[i] = memory + i * decoded + 8;

  if (top > 0) jpeg_skip_scanlines(info, (JDIMENSION)top);
  while ((int32_t)info->output_scanline < bottom) {
    int32_t at = (int32_t)info->output_scanline - top;
    int32_t wanted = bottom - (int32_t)info->output_scanline;
    JDIMENSION got = jpeg_read_scanlines(info, rows, (JDIMENSION)(wanted < ROWS ? wanted : ROWS));
    if (got == 0 || at < 0) return DISTDL_BROKEN; /* it cannot wait for more bytes */
    for (JDIMENSION i = 0; i < got && resizes; i++)
      use->resize_row(rows[i], crop->left - (int32_t)begin, across, crop->flip != 0,
                      middle + ((size_t)at + i) * resized);
  }
  for (int32_t row = 0; row < crop->size && resizes; row++) {
    const uint8_t *from = middle + (size_t)(down->first[row] - down->first[0]) * resized;
    use->sum_rows(from, resized, down->inputs[row], down->weights + (size_t)row * down->taps,
                  down->precision, ((size_t)crop->size * 4 + 15) & ~(size_t)15, last);
    use->pack_row(last, crop->size, out + (size_t)row * crop->size * 3);
  }

  if (flags & DISTDL_WHOLE) {
    /* libjpeg does not look at the rows up to the end if it is asked to skip them all. */
    JDIMENSION left_over = info->output_height - info->output_scanline;
    if (left_over > 1) jpeg_skip_scanlines(info, left_over - 1);
    if (left_over > 0 && jpeg_read_scanlines(info, rows, 1) != 1) return DISTDL_BROKEN;
    jpeg_finish_decompress(info); /* reads on to the end of the image */
  }
  return DISTDL_DONE;
}

void distdl_sizes(size_t count, const uint8_t *const *files, const size_t *lengths,
                  int64_t most_pixels, int32_t *sizes, int32_t *outcomes) {
  for (size_t i = 0; i < count; i++) {
    struct header header = {0, 0, 0};
    int plain = read_header(files[i], lengths[i], most_pixels, &header);
    outcomes[i] = plain ? DISTDL_DONE : DISTDL_NOT_PLAIN;
    sizes[2 * i] = plain ? header.height : 0;
    sizes[2 * i + 1] = plain ? header.width : 0;
  }
}

static int crop_one(struct distdl_scratch *scratch, const uint8_t *file, size_t length,
                    int64_t most_pixels, const struct distdl_crop *crop, int32_t flags,
                    uint8_t *out, size_t out_bytes) {
  struct header header;
  if (!read_header(file, length, most_pixels, &header)) return DISTDL_NOT_PLAIN;
  if (!fits(crop, &header)) return DISTDL_WRONG_CROP;
  if ((size_t)crop->size * crop->size * 3 > out_bytes) return DISTDL_WRONG_CROP;
  struct axis across, down;
  if (!make_axis(&scratch->across, crop->width, crop->to_width, crop->keep_left, crop->size,
                 &across) ||
      !make_axis(&scratch->down, crop->height, crop->to_height, crop->keep_top, crop->size, &down))
    return DISTDL_TOO_LARGE;
  /* A new one for each file: libjpeg keeps tables for the next file, which may lack its own. */
  struct decoder decoder;
  memset(&decoder, 0, sizeof decoder);
  int outcome = decode(&decoder, &scratch->pixels, file, length, &header, crop, &across, &down,
                       flags, out);
  jpeg_destroy_decompress(&decoder.info);
  return outcome;
}

void distdl_crops(struct distdl_scratch *scratch, size_t count, const uint8_t *const *files,
                  const size_t *lengths, int64_t most_pixels, const struct distdl_crop *crops,
                  const int32_t *flags, uint8_t *const *outs, size_t out_bytes,
                  int32_t *outcomes) {
  for (size_t i = 0; i < count; i++)
    outcomes[i] = crop_one(scratch, files[i], lengths[i], most_pixels, &crops[i], flags[i],
                           outs[i], out_bytes);
}
