#define LANES 8
#define KERNELS kernels_avx2
#include "range_search.inc"
