#!/bin/sh
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20 from Debian's own source, and
# installs etcd: `make servers-kube`. About 8 CPU minutes and 2 GB. The argument is the folder.
set -eu
mkdir -p "$1/bin" "$1/src" "$1/lists/partial"
cd "$1"
W=$PWD
# Lists of its own, so that the machine's sources stay as they are.
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
for kind in deb deb-src; do
    echo "$kind [signed-by=$keyring] http://deb.debian.org/debian bookworm main"
done > sources.list
apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 -o "Dir::Etc::sourcelist=$W/sources.list" \
        -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$W/lists" "$@"
}
apt update
apt install -y --no-install-recommends golang-1.19-go etcd-server dpkg-dev openssl
apt source --download-only kubernetes
tar xzf kubernetes_1.20.5*.orig.tar.gz -C src --strip-components=1
# The vendored 1.0.1 of reflect2 crashes under Go 1.18 and later once a custom object is created.
apt download golang-github-modern-go-reflect2-dev
dpkg -x golang-github-modern-go-reflect2-dev*.deb debs
rm -rf src/vendor/github.com/modern-go/reflect2
cp -r debs/usr/share/gocode/src/github.com/modern-go/reflect2 src/vendor/github.com/modern-go/
rm -f src/vendor/github.com/modern-go/reflect2/*_test.go

mkdir -p src/.go/src/k8s.io
ln -sfn ../../.. src/.go/src/k8s.io/kubernetes
cd src/.go/src/k8s.io/kubernetes
export GO111MODULE=off GOPATH="$W/src/.go" GOPROXY=off CGO_ENABLED=0 GOCACHE="$W/gocache"
export GOROOT=/usr/lib/go-1.19 PATH="/usr/lib/go-1.19/bin:$PATH" PWD="$W/src/.go/src/k8s.io/kubernetes"
go build -o "$W/bin/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
# The one generated file that the tarball lacks.
packages=$(grep -rlE '^\s*//\s*\+k8s:openapi-gen=true' --include=*.go staging/src/k8s.io pkg | xargs -n1 dirname |
    sort -u | grep -vE 'testdata|example|sample|code-generator' |
    sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; t; s#^#k8s.io/kubernetes/#' | paste -sd,)
echo > hack/boilerplate/empty.txt
"$W/bin/openapi-gen" -O zz_generated.openapi -p k8s.io/kubernetes/pkg/generated/openapi \
    --go-header-file hack/boilerplate/empty.txt -r "$W/violations" --output-base "$GOPATH/src" -i "$packages"
go build -gcflags=all=-l -ldflags '-s -w' -o "$W/bin/" k8s.io/kubernetes/cmd/kube-apiserver \
    k8s.io/kubernetes/cmd/kube-controller-manager k8s.io/kubernetes/cmd/kube-scheduler
rm -rf "$W/gocache" "$W/debs" "$W/lists"
