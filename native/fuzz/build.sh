#!/bin/sh
# Builds the harness with AddressSanitizer and UndefinedBehaviorSanitizer: build.sh TO [JPEG]
# JPEG: a folder with the sources of libjpeg-turbo, which is then built with the sanitizers, too;
# without it the system's library is linked, as it is.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=$1
sanitize="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
if [ $# -gt 1 ]; then
  cmake -S "$2" -B "$to/jpeg" -DCMAKE_BUILD_TYPE=None "-DCMAKE_C_FLAGS=$sanitize" -DWITH_SIMD=0 \
    -DENABLE_SHARED=0 -DWITH_TURBOJPEG=0 >"$to/jpeg.log"
  cmake --build "$to/jpeg" --target jpeg-static >>"$to/jpeg.log"
  jpeg="-I$2 -I$to/jpeg $to/jpeg/libjpeg.a"
else
  jpeg="-ljpeg"
fi
# shellcheck disable=SC2086  # the options are several words
${CC:-cc} -std=c11 -Wall -Wextra $sanitize -o "$to/harness" "$here/harness.c" "$here/../header.c" \
  "$here/../resize.c" "$here/../decode.c" $jpeg -lm
