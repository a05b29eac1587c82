#define INFERENCEX_ISA avx512_bf16
#define INFERENCEX_ISA_NAME "avx512_bf16"
#include "kernels.inc"
