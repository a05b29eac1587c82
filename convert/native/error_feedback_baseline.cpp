#define LANES 4
#define KERNELS feedback_baseline
#include "error_feedback.inc"
