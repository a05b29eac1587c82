#define INFERENCEX_ISA avx512_vnni
#define INFERENCEX_ISA_NAME "avx512_vnni"
#include "kernels.inc"
