#define INFERENCEX_ISA neon
#define INFERENCEX_ISA_NAME "neon"
#include "kernels.inc"
