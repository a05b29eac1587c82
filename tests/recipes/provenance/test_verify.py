"""A bundle that was changed, anywhere, is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferencex.cli.console import exit_status
from inferencex.cli.sign import app as sign
from inferencex.cli.verify import app as verify_app
from inferencex.formats.bundle import BundleWriter
from inferencex.formats.errors import BundleError, OptionError
from inferencex.recipes.provenance.checksums import SIGNATURE_FILE, SUMS_FILE, parse_checksums, write_checksums
from inferencex.recipes.provenance.signing import check_signature, new_key, public_key_of, sign_file
from inferencex.recipes.provenance.verify import verify
from tests.formats.bundle.small import fill


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        writer.commit()
    return tmp_path / "bundle"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key", "")
    return tmp_path / "key"


def test_bundle_alone(bundle: Path) -> None:
    found = verify(bundle)
    assert len(found.checks) == 1 and "SHA256SUMS" in found.doubts[0]
    weights = bundle / "weights-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights-00001.*sha256"):
        verify(bundle)


def test_signed(bundle: Path, key: Path) -> None:
    sign_file(write_checksums(bundle), key, bundle / SIGNATURE_FILE)
    found = verify(bundle, public_key=str(key) + ".pub")
    assert len(found.checks) == 3 and not found.doubts
    assert verify(bundle, public_key=public_key_of(key)).checks == found.checks, "the key's text does as well"
    assert "was not checked" in verify(bundle).doubts[0]
    first = (bundle / SIGNATURE_FILE).read_bytes()
    sign_file(bundle / SUMS_FILE, key, bundle / SIGNATURE_FILE)
    assert (bundle / SIGNATURE_FILE).read_bytes() == first, "equal files get equal signatures"


@pytest.mark.parametrize("change", ["edit", "remove", "add", "sums", "signature", "none", "other key"])
def test_tampering(bundle: Path, key: Path, tmp_path: Path, change: str) -> None:
    sign_file(write_checksums(bundle), key, bundle / SIGNATURE_FILE)
    public = public_key_of(key)
    words = "are not as SHA256SUMS says"
    if change == "edit":
        (bundle / "model.onnx").write_bytes((bundle / "model.onnx").read_bytes() + b" ")
    elif change == "remove":
        (bundle / "model.onnx").unlink()
    elif change == "add":
        (bundle / "chat_template.jinja").touch()
    elif change == "sums":  # with the hashes of what was changed
        (bundle / "chat_template.jinja").touch()
        write_checksums(bundle)
        words = "do not trust it"
    elif change == "signature":
        text = (bundle / SIGNATURE_FILE).read_text(encoding="utf-8")
        (bundle / SIGNATURE_FILE).write_text(text.replace("file:", "hash:"), encoding="utf-8")
        words = "do not trust it"
    elif change == "none":
        (bundle / SIGNATURE_FILE).unlink()
        words = "is missing, so that nothing says who made"
    else:
        new_key(tmp_path / "other", "")
        public, words = public_key_of(tmp_path / "other"), "do not trust it"
    with pytest.raises(BundleError, match=words):
        verify(bundle, public_key=public)


def test_keys(bundle: Path, key: Path, tmp_path: Path) -> None:
    sums = write_checksums(bundle)
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(OptionError, match="exists; name another file"):
        new_key(key, "")
    new_key(tmp_path / "locked", "sesame")
    with pytest.raises(OptionError, match="has a password"):
        sign_file(sums, tmp_path / "locked", bundle / SIGNATURE_FILE)
    with pytest.raises(OptionError, match="the password is not that of the key"):
        sign_file(sums, tmp_path / "locked", bundle / SIGNATURE_FILE, lambda: "wrong")
    sign_file(sums, tmp_path / "locked", bundle / SIGNATURE_FILE, lambda: "sesame")
    check_signature(sums, bundle / SIGNATURE_FILE, str(tmp_path / "locked.pub"))
    with pytest.raises(OptionError, match="is not a secret key"):
        sign_file(sums, sums, bundle / SIGNATURE_FILE)
    with pytest.raises(OptionError, match="neither a file nor a public key"):
        check_signature(sums, bundle / SIGNATURE_FILE, "RWQnonsense")
    (bundle / SIGNATURE_FILE).write_text("nonsense", encoding="utf-8")
    with pytest.raises(BundleError, match="is not a signature of minisign"):
        check_signature(sums, bundle / SIGNATURE_FILE, public_key_of(key))


@pytest.mark.parametrize("subjects", ["[]", '[{"name": "x", "digest": {"sha256": "DIGEST"}}]'])
def test_a_statement_about_nothing(bundle: Path, subjects: str) -> None:
    (bundle / "x").touch()
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (bundle / "provenance.json").write_text('{"subject": ' + subjects.replace("DIGEST", digest) + "}", encoding="utf-8")
    with pytest.raises(BundleError, match=r"provenance.json: does not speak of"):
        verify(bundle)


@pytest.mark.parametrize("line", ["x", "0" * 64 + "  ../x", "0" * 64 + "  /x", "0" * 63 + "  x", "\xff"])
def test_hostile_checksums(line: str) -> None:
    with pytest.raises(BundleError, match=r"^SUMS"):
        parse_checksums(line.encode("latin-1"), "SUMS")


def test_command_line(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status(sign, "inferencex sign", [f"--new-key={tmp_path / 'k'}", "--no-password"]) == 0
    public = capfd.readouterr().out.strip()
    assert exit_status(sign, "inferencex sign", [str(bundle), f"--key={tmp_path / 'k'}"]) == 0
    assert exit_status(verify_app, "inferencex verify", [str(bundle), f"--public-key={public}"]) == 0
    assert capfd.readouterr().out.count("ok: ") == 3
    (bundle / "model.onnx").unlink()
    assert exit_status(verify_app, "inferencex verify", [str(bundle)]) == 1
    assert "model.onnx is missing" in capfd.readouterr().err.replace("\n", " ")
    assert exit_status(verify_app, "inferencex verify", [str(tmp_path / "absent")]) == 1
    assert exit_status(verify_app, "inferencex verify", [str(bundle), "--signature=x"]) == 1
    assert exit_status(sign, "inferencex sign", [str(bundle)]) == 1
