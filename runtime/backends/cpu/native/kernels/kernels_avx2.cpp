#define INFERENCEX_ISA avx2
#define INFERENCEX_ISA_NAME "avx2"
#include "kernels.inc"
