#define KERNELS feedback_baseline
#include "error_feedback.inc"
