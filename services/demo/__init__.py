"""The demo checkpoint, as package data: an ordinary diffusers folder, so that Stepweave draws without a download."""

from pathlib import Path

DEMO_CHECKPOINT = Path(__file__).parent / "checkpoint"
DEMO_MODEL_NAME = "demo"
