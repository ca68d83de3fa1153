#!/bin/sh
# Debian's sources of libjpeg-turbo with its patches, for build.sh: sources.sh TO. Needs apt-get and
# dpkg-dev, but not root; its lists are its own, so that the machine's stay as they are.
set -eu
rm -rf "$1.part"  # of one that was cut off: apt-get would not unpack it again
mkdir -p "$1.part/lists/partial"
cd "$1.part"
here=$PWD
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb-src [signed-by=$keyring] http://deb.debian.org/debian bookworm main" > sources.list
apt() {
  apt-get -qq -o "Dir::Etc::sourcelist=$here/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State::lists=$here/lists" -o "Dir::Cache=$here" -o APT::Sandbox::User= "$@"
}
apt update
apt source libjpeg-turbo
cd ..
mv "$here"/libjpeg-turbo-*/ "$(basename "$1")"
rm -rf "$here"
