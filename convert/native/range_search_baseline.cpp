#define LANES 4
#define KERNELS kernels_baseline
#include "range_search.inc"
