"""One thread for torch: the test files share the cores."""

import torch

torch.set_num_threads(1)
