#define LANES 16
#define KERNELS kernels_avx512
#include "range_search.inc"
