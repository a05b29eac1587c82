#define LANES 8
#define KERNELS feedback_avx2
#include "error_feedback.inc"
