"""Settings of every test run: few threads and no network."""

import os

# Before torch is imported, here and in the processes that tests start. Threads that spin while ranks share cores make
# small steps 5 to 10 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
