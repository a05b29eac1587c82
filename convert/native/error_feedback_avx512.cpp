#define LANES 16
#define KERNELS feedback_avx512
#include "error_feedback.inc"
