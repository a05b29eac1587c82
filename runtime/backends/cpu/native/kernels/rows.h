// Kernels that work on one row at a time: normalization, gates, rotation, quantization of activations.
#pragma once

#include <cstdint>

#include "../activation.h"
#include "../quantized_rows.h"

namespace inferencex::cpu {

// Every element of a row is computed by the same operations wherever it lies, and every sum over a row in an order that
// only its length decides: a row cut into parts gives the elements of the whole.
struct RowKernels {
    // y = x / sqrt(mean(x^2) + epsilon) * scale; scale null: 1. With `residual` x + residual takes x's place, and is
    // stored in `sum` (which may be `residual`, `x` or `y`). y may be x.
    void (*rms_norm)(const float *x, const float *residual, const float *scale, float epsilon, std::int64_t n,
                     float *sum, float *y);
    // y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias; scale and bias may be null; `residual`, `sum` as
    // above.
    void (*layer_norm)(const float *x, const float *residual, const float *scale, const float *bias, float epsilon,
                       std::int64_t n, float *sum, float *y);
    // y[i] = activation(gate[i]) * up[i], swiglu_clamped as the dialect's GatedActivation defines it. y may be gate or
    // up.
    void (*gate)(const float *gate, const float *up, Activation activation, float alpha, float limit, std::int64_t n,
                 float *y);
    // The same for interleaved columns: gate = x[0], x[2], ...; n results from 2n columns. y may be x.
    void (*gate_interleaved)(const float *x, Activation activation, float alpha, float limit, std::int64_t n, float *y);
    // y[i] = activation(x[i]), for activations without a gate; not swiglu_clamped. y may be x.
    void (*activate)(const float *x, Activation activation, std::int64_t n, float *y);
    // Rotate one head [width] by cos/sin [dim / 2]; the first `dim` columns, the others are copied (ONNX
    // RotaryEmbedding). y may be x.
    void (*rotate)(const float *x, const float *cos, const float *sin, std::int64_t width, std::int64_t dim,
                   bool interleaved, float *y);
    // Quantize one row [layout.features] to INT8: scale = max|x| / 127 of each block. Not finite x gives scale NaN.
    void (*quantize)(const float *x, const BlockLayout &layout, std::int8_t *values, float *scales, std::int32_t *sums);
    // Some blocks of such a row, with the same bits: each `n` features, side by side in x, into `stride` bytes (the
    // layout's), zeros after them.
    void (*quantize_blocks)(const float *x, std::int64_t n, std::int64_t stride, std::int64_t count,
                            std::int8_t *values, float *scales, std::int32_t *sums);
    // The same with a given scale for the whole row; integers saturate at -128 and 127, as QuantizeLinear's do.
    void (*quantize_static)(const float *x, const BlockLayout &layout, float scale, std::int8_t *values, float *scales,
                            std::int32_t *sums);
    void (*softmax)(const float *x, std::int64_t n, float *y);
    // Conversions of stored types to float.
    void (*from_bf16)(const std::uint16_t *x, std::int64_t n, float *y);
    void (*from_f16)(const std::uint16_t *x, std::int64_t n, float *y);
    // y[i] = (x[i] - zero_point) * scale.
    void (*from_int8)(const std::int8_t *x, float scale, float zero_point, std::int64_t n, float *y);
    // The same for elements `first..first + n` of flat 4-bit integers, two to a byte, the first in the low half.
    void (*from_int4)(const std::uint8_t *x, std::int64_t first, bool is_signed, float scale, float zero_point,
                      std::int64_t n, float *y);
    // The first of `count` integers of 3, 5 or 6 bits, one to a byte, from the first byte of a stream that has `bytes`.
    // Returns how many: a multiple of 8, as long as whole words can be read.
    std::int64_t (*spread_stream)(const std::uint8_t *stream, std::int64_t bytes, int bits, bool is_signed,
                                  std::int64_t count, std::uint8_t *to);
    // row[i] -= zeros[i / group], in bytes.
    void (*subtract_zeros)(const std::uint8_t *zeros, std::int64_t group, std::int64_t count, std::uint8_t *row);
};

}  // namespace inferencex::cpu
