#define KERNELS feedback_avx2
#include "error_feedback.inc"
