/* Feeds mutated JPEGs to the library, without Python: harness COUNT SEED FILE...

   Each of COUNT files is one of FILE with a few bytes changed, cut out or repeated, and is cropped in
   three ways, some of which lie outside the image. Every buffer is of exactly the size that the
   library is told, so that AddressSanitizer sees each byte beyond. It prints how many were decoded;
   what a sanitizer finds ends it. */

#include "../distdl_native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PIXELS 4000000

static uint64_t state;

/* splitmix64: the same files for the same seed. */
static uint64_t draw(uint64_t below) {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) % below;
}

struct file {
  uint8_t *bytes;
  size_t length;
};

static struct file load(const char *path) {
  FILE *stream = fopen(path, "rb");
  if (stream == NULL || fseek(stream, 0, SEEK_END) != 0) exit(2);
  struct file file = {NULL, (size_t)ftell(stream)};
  file.bytes = malloc(file.length);
  rewind(stream);
  if (file.bytes == NULL || fread(file.bytes, 1, file.length, stream) != file.length) exit(2);
  fclose(stream);
  return file;
}

/* A changed copy, of exactly its length. Half of the changes are among the first 700 bytes, where
   sizes and tables are. */
static struct file mutated(const struct file *original) {
  size_t length = original->length;
  uint8_t *bytes = malloc(2 * length + 1);
  if (bytes == NULL) exit(2);
  memcpy(bytes, original->bytes, length);
  uint64_t changes = draw(6);
  for (uint64_t i = 0; i < changes && length > 1; i++) {
    size_t at = draw(draw(2) && length > 700 ? 700 : length);
    size_t some = 1 + draw(length - at);
    switch (draw(6)) {
      case 0: /* a bit */
        bytes[at] ^= (uint8_t)(1u << draw(8));
        break;
      case 1: /* a byte */
        bytes[at] = (uint8_t)draw(256);
        break;
      case 2: /* a marker, of any kind */
        bytes[at] = 0xFF;
        if (at + 1 < length) bytes[at + 1] = (uint8_t)(0xC0 + draw(64));
        break;
      case 3: /* the end is missing */
        length = at + 1;
        break;
      case 4: /* a piece is missing */
        memmove(bytes + at, bytes + at + some, length - at - some);
        length -= some;
        break;
      default: /* a piece is repeated */
        if (some > 4096) some = 4096;
        if (length + some > 2 * original->length) break;
        memmove(bytes + at + some, bytes + at, length - at);
        length += some;
    }
  }
  struct file file = {malloc(length ? length : 1), length};
  if (file.bytes == NULL) exit(2);
  memcpy(file.bytes, bytes, length);
  free(bytes);
  return file;
}

static int32_t any(int32_t from, int32_t to) { return from + (int32_t)draw((uint64_t)(to - from + 1)); }

static struct distdl_crop any_crop(const int32_t *size) {
  struct distdl_crop crop;
  int32_t height = size[0] > 0 ? size[0] : 100;
  int32_t width = size[1] > 0 ? size[1] : 100;
  crop.height = any(1, height);
  crop.width = any(1, width);
  crop.top = any(0, height - crop.height);
  crop.left = any(0, width - crop.width);
  crop.to_height = any(1, 300);
  crop.to_width = any(1, 300);
  crop.size = any(1, crop.to_height < crop.to_width ? crop.to_height : crop.to_width);
  crop.keep_top = any(0, crop.to_height - crop.size);
  crop.keep_left = any(0, crop.to_width - crop.size);
  crop.flip = any(0, 1);
  if (draw(8) == 0) { /* one that may be impossible */
    int32_t *fields = (int32_t *)&crop;
    static const int32_t odd[] = {-1, 0, 1, 65535, 65536, INT32_MAX, INT32_MIN};
    fields[draw(10)] = odd[draw(7)];
  }
  return crop;
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  long count = atol(argv[1]);
  state = (uint64_t)atol(argv[2]);
  int originals = argc - 3;
  struct file *files = malloc((size_t)originals * sizeof *files);
  if (files == NULL) return 2;
  for (int i = 0; i < originals; i++) files[i] = load(argv[3 + i]);
  struct distdl_scratch *scratch = distdl_scratch_new();
  if (scratch == NULL) return 2;
  long outcomes[5] = {0};
  for (long i = 0; i < count; i++) {
    struct file file = mutated(&files[draw((uint64_t)originals)]);
    const uint8_t *bytes = file.bytes;
    int32_t size[2];
    int32_t outcome;
    distdl_sizes(1, &bytes, &file.length, MOST_PIXELS, size, &outcome);
    for (int crops = 0; crops < 3; crops++) {
      struct distdl_crop crop = any_crop(size);
      /* As much room as the crop says, if it says something possible. */
      size_t room = crop.size > 0 && crop.size <= 300 ? (size_t)crop.size * crop.size * 3 : 1;
      uint8_t *out = malloc(room);
      if (out == NULL) return 2;
      int32_t flags = (int32_t)draw(16);
      distdl_crops(scratch, 1, &bytes, &file.length, MOST_PIXELS, &crop, &flags, &out, room,
                   &outcome);
      if (outcome < 0 || outcome > 4) return 1;
      outcomes[outcome]++;
      free(out);
    }
    free(file.bytes);
  }
  distdl_scratch_free(scratch);
  for (int i = 0; i < originals; i++) free(files[i].bytes);
  free(files);
  printf("files %ld done %ld not_plain %ld broken %ld too_large %ld wrong_crop %ld\n", count,
         outcomes[0], outcomes[1], outcomes[2], outcomes[3], outcomes[4]);
  return 0;
}
