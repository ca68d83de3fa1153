/* What the files of the library share. */

#ifndef DISTDL_INTERNAL_H
#define DISTDL_INTERNAL_H

#include "distdl_native.h"

#define MOST_FILE ((size_t)1 << 30) /* bytes of a file */
#define MOST_SIDE 65535             /* pixels of a side, before and after resizing */

struct header {
  int32_t height, width, components;
};

/* Whether a file is decoded here; then `header` is what it says. */
int read_header(const uint8_t *file, size_t length, int64_t most_pixels, struct header *header);

/* Memory that grows and is used again, for one purpose. */
struct buffer {
  uint8_t *bytes;
  size_t size;
};

/* At least `size` bytes, aligned to 64, whose content is undefined; NULL if that is too much. */
void *need(struct buffer *buffer, size_t size);

/* How one axis is resized: for each pixel that is kept, where its inputs begin, how many they are,
   and their weights, integers of which 2^precision means 1. */
struct axis {
  int32_t count;     /* pixels that are kept */
  int32_t taps;      /* room for weights for each of them, an even number */
  int32_t precision; /* 1 to 22 */
  int32_t *first;    /* [count], from the start of the box, rising */
  int32_t *inputs;   /* [count], at least 1 and at most `taps` */
  int16_t *weights;  /* [count][taps], zeros behind the last input */
};

/* Resizing `in` pixels to `out`, of which `count` from `keep` on are kept. 0 if there is no
   memory. */
int make_axis(struct buffer *memory, int32_t in, int32_t out, int32_t keep, int32_t count,
              struct axis *axis);

/* One row of pixels of 4 bytes, which begins at the box's left edge less `skipped` pixels, resized to
   `axis->count` pixels of 4 bytes, perhaps mirrored. Reads at most 16 bytes behind the last input. */
typedef void resize_row(const uint8_t *row, int32_t skipped, const struct axis *axis, int flip,
                        uint8_t *to);

/* The weighted sum of `inputs` rows of `bytes` bytes, which are `stride` bytes apart, to one row.
   `bytes` is a multiple of 16. */
typedef void sum_rows(const uint8_t *rows, size_t stride, int32_t inputs, const int16_t *weights,
                      int32_t precision, size_t bytes, uint8_t *to);

/* Pixels of 4 bytes to pixels of 3. Writes 3 * count bytes, no more. */
typedef void pack_row(const uint8_t *row, int32_t count, uint8_t *to);

struct kernels {
  resize_row *resize_row;
  sum_rows *sum_rows;
  pack_row *pack_row;
};

/* The fastest that this processor has; `plain_c`: those without vector instructions. All give the
   same bytes. */
const struct kernels *kernels(int plain_c);

#endif
