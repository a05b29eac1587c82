#!/bin/sh
# Put an aarch64 Python, as Debian packs it, and the packages that the kernels' tests import into a folder. Nothing is
# installed on this system: apt works on lists and archives of its own.
#
#     aarch64-python.sh FOLDER    makes FOLDER/root (the system), FOLDER/site (packages), FOLDER/include (for pyconfig.h)
set -eu
repository=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/root" "$folder/include"

apt() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$folder/apt" \
        -o Dir::State::Lists="$folder/apt/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$folder/apt" \
        -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 "$@"
}
apt update
apt --yes --no-install-recommends --download-only install libpython3-dev python3-minimal libpython3-stdlib libstdc++6
for package in "$folder"/apt/archives/*.deb; do
    dpkg-deb --extract "$package" "$folder/root"
done
rm -r "$folder/apt"

# Debian's pyconfig.h includes one in a folder named after the processor.
ln -sfn ../root/usr/include/aarch64-linux-gnu "$folder/include/aarch64-linux-gnu"
set -- "$folder"/root/usr/include/python3.*
ln -sfn "$1" "$folder/include/python"
version=${1##*/python}

"${PYTHON:-python3}" -m pip --disable-pip-version-check install --quiet --upgrade --target "$folder/site" \
    --python-version "$version" --only-binary=:all: -c "$repository/constraints.txt" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
    hypothesis jinja2 ml_dtypes numpy onnx pytest safetensors tokenizers
