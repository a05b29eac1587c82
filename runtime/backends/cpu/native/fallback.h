// An operation without a native kernel: a function given by the caller, run by one thread while the others wait.
#pragma once

#include <functional>
#include <memory>

#include "operation.h"

namespace inferencex::cpu {

using FallbackFunction = std::function<void(const Worker &)>;

class Fallback final : public Operation {
  public:
    explicit Fallback(FallbackFunction function) : function_(std::move(function)) {}
    void run(const Worker &worker) const override {
        if (worker.index == 0) function_(worker);
    }

  private:
    FallbackFunction function_;
};

}  // namespace inferencex::cpu
