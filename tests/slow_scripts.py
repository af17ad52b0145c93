"""Scripts that are profiled and tuned as they are: a slow data set, loops over it, and what is odd in scripts."""

SLOW_DATA = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)

class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(32), index % 2
"""
LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
lightning.Trainer(max_steps=45, **options).fit(Model(), torch.utils.data.DataLoader(Clips(), 8))
"""
ACCELERATE = """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))
loader = torch.utils.data.DataLoader(Clips(), 8)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for inputs, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(net(inputs), labels))
    optimizer.step(), optimizer.zero_grad()
"""
# Odd, before a loop of `w`: it prints otherwise and forks; and after it: a second loop.
FORKS = """
import builtins, os, sys
builtins.print = lambda *words, **_: sys.stdout.write("mine")
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
"""
SECOND_LOOP = """
o = torch.optim.SGD(w.parameters(), 0.1)
for i in range(5):
    w(torch.randn(2, 4)).sum().backward(), o.step()
"""
