#!/bin/sh
# Builds kernel.bin from kernel.c with Debian's gcc-riscv64-unknown-elf; OUT is the file to write.
set -e
out=$(realpath "${1:?which file to write}")
cd "$(dirname "$0")"
riscv64-unknown-elf-gcc -march=rv32im -mabi=ilp32 -O2 -ffreestanding -nostdlib -fno-pic \
  -mno-relax -msmall-data-limit=0 -fno-jump-tables -fno-tree-loop-distribute-patterns \
  -fno-ident -Wall -Wextra -Werror -Wno-main -Wno-array-bounds \
  -Wl,--entry=main -Wl,--build-id=none -Wl,-T,kernel.ld \
  kernel.c -o "$out.elf"
riscv64-unknown-elf-objcopy -O binary "$out.elf" "$out"
rm "$out.elf"
