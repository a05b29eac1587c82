#define INFERENCEX_ISA baseline
#define INFERENCEX_ISA_NAME "baseline"
#include "kernels.inc"
