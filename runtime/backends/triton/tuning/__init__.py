"""How kernels are launched: measured once on a device and kept on disk, or a default that always works."""

from inferencex.runtime.backends.triton.tuning.cache import configuration as configuration
from inferencex.runtime.backends.triton.tuning.cache import remembered as remembered
from inferencex.runtime.backends.triton.tuning.config import Config as Config
from inferencex.runtime.backends.triton.tuning.tuner import Tuner as Tuner
from inferencex.runtime.backends.triton.tuning.tuner import bucket_of as bucket_of
