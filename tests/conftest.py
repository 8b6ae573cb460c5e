"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before anything imports huggingface_hub: a test that would reach for the hub fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

# With more threads than free cores, small matrices are slower by a multiple: the threads wait for each other.
torch.set_num_threads(1)
