/* What the library offers: the sizes of JPEG files, and square crops of them, resized.

   Every function may be called by several threads at once, each with a scratch of its own. None
   keeps a pointer that it was given, calls back, prints, or ends the process. */

#ifndef DISTDL_NATIVE_H
#define DISTDL_NATIVE_H

#include <stddef.h>
#include <stdint.h>

/* Raised when a signature or a meaning changes: whoever loads the library compares it. */
#define DISTDL_NATIVE_VERSION 1

/* What became of an image. All but DONE mean that its pixels were not written, or not all of them,
   and that another decoder decides. */
enum distdl_outcome {
  DISTDL_DONE = 0,
  DISTDL_NOT_PLAIN = 1, /* not a JPEG of the kind that is decoded here (distdl_sizes) */
  DISTDL_BROKEN = 2,    /* libjpeg has found an error, or something to warn of */
  DISTDL_TOO_LARGE = 3, /* more memory would be needed than DISTDL_MOST_BYTES */
  DISTDL_WRONG_CROP = 4 /* the crop does not fit the image */
};

/* Memory for the work on one image, at most. A crop of 224 pixels needs less than 1 MiB. */
#define DISTDL_MOST_BYTES ((size_t)256 << 20)

/* A crop: a box of the image is resized, and a square of the result is kept, and perhaps mirrored.
   All sizes are in pixels; `keep_top` and `keep_left` count within the resized box. */
struct distdl_crop {
  int32_t top, left, height, width;
  int32_t to_height, to_width;
  int32_t keep_top, keep_left, size;
  int32_t flip;
};

/* What to do with an image, beside the crop. */
#define DISTDL_WHOLE 1 /* decode the file to its end, so that damage behind the crop is found */
#define DISTDL_PLAIN_C 2 /* use no vector instructions: for comparisons */
/* For measurements; the pixels are then undefined. */
#define DISTDL_ONLY_ENTROPY 4 /* with DISTDL_WHOLE: decode numbers, make pixels of the last row */
#define DISTDL_ONLY_PIXELS 8  /* decode, and do not resize */

struct distdl_scratch;

#pragma GCC visibility push(default) /* all else is hidden */

int32_t distdl_native_version(void);

/* Which of the flags for measurements are known, added. */
int32_t distdl_native_measures(void);

/* NULL if there is no memory. */
struct distdl_scratch *distdl_scratch_new(void);
void distdl_scratch_free(struct distdl_scratch *scratch);

/* For each of `count` files whether it is decoded here, and its height and width: a JPEG with 8 bits
   a sample, in grey or YCbCr with the usual subsamplings, sequential, Huffman-coded, with one scan,
   and of at most `most_pixels`. Only the segments before the scan are read.

   sizes: [count][2], height and width; zeros for files that are not decoded here.
   outcomes: [count]. */
void distdl_sizes(size_t count, const uint8_t *const *files, const size_t *lengths,
                  int64_t most_pixels, int32_t *sizes, int32_t *outcomes);

/* The crops of `count` files, each as `size * size * 3` bytes of red, green and blue at its address
   in `outs`; `out_bytes` is the room at each of them. The pixels are those that libjpeg-turbo's
   whole image would have after torch's bilinear, antialiased resizing of uint8.

   flags: [count], DISTDL_WHOLE and others, added.
   outcomes: [count]. */
void distdl_crops(struct distdl_scratch *scratch, size_t count, const uint8_t *const *files,
                  const size_t *lengths, int64_t most_pixels, const struct distdl_crop *crops,
                  const int32_t *flags, uint8_t *const *outs, size_t out_bytes,
                  int32_t *outcomes);

#pragma GCC visibility pop

#endif
