/* Which JPEG files this library decodes, by the segments before their first scan.

   The format is in ITU-T T.81, annex B. What is odd in any way is left to others: they know more
   kinds, and say what is wrong with a broken file. */

#include "internal.h"

#define MOST_SEGMENTS 500 /* as in distdl's image_headers.py */
#define MOST_RATIO 500    /* of the sides, too */

static unsigned two_bytes(const uint8_t *at) { return (unsigned)at[0] << 8 | at[1]; }

/* Grey without subsampling, or three components of which the first has 1x1, 2x1, 1x2 or 2x2 samples
   for each of the others. `at` are three bytes for each component: name, samples, table. */
static int usual_sampling(const uint8_t *at, int components) {
  int first = at[1];
  if (components == 1) return first == 0x11;
  if (at[4] != 0x11 || at[7] != 0x11) return 0;
  return first == 0x11 || first == 0x21 || first == 0x12 || first == 0x22;
}

/* A start of frame of `length` bytes, without its marker. */
static int read_frame(const uint8_t *at, size_t length, int64_t most_pixels, struct header *header) {
  if (length < 8) return 0;
  header->height = (int32_t)two_bytes(at + 3);
  header->width = (int32_t)two_bytes(at + 5);
  header->components = at[7];
  if (at[2] != 8 || (header->components != 1 && header->components != 3)) return 0;
  if (length != 8 + 3 * (size_t)header->components) return 0;
  if (!usual_sampling(at + 8, header->components)) return 0;
  int32_t longer = header->height > header->width ? header->height : header->width;
  int32_t shorter = header->height > header->width ? header->width : header->height;
  if (shorter < 1 || longer > MOST_RATIO * shorter) return 0;
  return (int64_t)header->height * header->width <= most_pixels;
}

int read_header(const uint8_t *file, size_t length, int64_t most_pixels, struct header *header) {
  size_t at = 2;
  int has_frame = 0;
  if (length < 4 || length > MOST_FILE || file[0] != 0xFF || file[1] != 0xD8) return 0;
  for (int segment = 0; segment < MOST_SEGMENTS; segment++) {
    /* Marker and length; the length counts itself. */
    if (length - at < 4 || file[at] != 0xFF) return 0;
    unsigned marker = file[at + 1];
    const uint8_t *body = file + at + 2;
    size_t left = length - at - 2;
    size_t size = two_bytes(body);
    if (size < 2 || size > left) return 0;
    switch (marker) {
      case 0xC0: /* sequential, Huffman-coded */
      case 0xC1:
        if (has_frame || !read_frame(body, size, most_pixels, header)) return 0;
        has_frame = 1;
        break;
      case 0xDA: /* the scan: of all components, or there are more scans */
        return has_frame && size > 2 && body[2] == header->components;
      case 0xC4: /* tables */
      case 0xDB:
      case 0xDD:
      case 0xFE: /* a comment */
        break;
      default: /* what applications add; all else is another kind of JPEG, or broken */
        if (marker < 0xE0 || marker > 0xEF) return 0;
    }
    at += 2 + size;
  }
  return 0;
}
