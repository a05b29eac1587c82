"""The bundle: what conversion writes and every backend reads."""

from inferencex.formats.bundle.manifest import FileRecord, Manifest, TensorQuantization
from inferencex.formats.bundle.reader import Bundle
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.bundle.staging import check_destination, check_disk_space
from inferencex.formats.bundle.writer import BundleWriter

__all__ = [
    "Bundle",
    "BundleWriter",
    "FileRecord",
    "Manifest",
    "StoredTensor",
    "TensorQuantization",
    "check_destination",
    "check_disk_space",
]
