"""pytorch/examples mnist/main.py, with made-up digits. What the library needs is one line:

     model = Net().to(device)
    +model = ap.parallelize(model)
     optimizer = optim.Adadelta(model.parameters(), lr=args.lr)

    python examples/mnist.py --plain
    python examples/mnist.py
    torchrun --standalone --nproc-per-node 2 examples/mnist.py

All print the same numbers with --dropout 0: with dropout, other devices draw other masks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import autopar_torch as ap


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(dropout / 2)
        self.dropout2 = nn.Dropout(dropout)
        self.fc1 = nn.Linear(2304, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def digits(rows: int, seed: int) -> TensorDataset:
    """Ten patterns of 16 x 16 points, each seen through noise."""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (rows,), generator=source)
    return TensorDataset(patterns[target] + torch.randn(rows, 1, 16, 16, generator=source), target)


def train(model: nn.Module, device: torch.device, loader: DataLoader[tuple[Tensor, ...]],
          optimizer: optim.Optimizer) -> list[float]:
    model.train()
    losses = []
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test(model: nn.Module, device: torch.device,
         loader: DataLoader[tuple[Tensor, ...]]) -> tuple[float, int]:
    model.eval()
    test_loss, correct, seen = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += int(pred.eq(target.view_as(pred)).sum().item())
            seen += len(target)
    return test_loss / seen, correct


def main(given: Sequence[str] | None = None) -> list[float]:
    """Every loss of training, and after each epoch the loss and the hits of the test."""
    parser = argparse.ArgumentParser(description="mnist/main.py with made-up digits.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="one process, without the library")
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    # Every process loads the same global batches: a generator of its own keeps their order equal.
    train_loader = DataLoader(digits(args.rows, 1), args.batch_size, shuffle=True,
                              generator=torch.Generator().manual_seed(args.seed))
    test_loader = DataLoader(digits(100, 2), 60)

    model: nn.Module = Net(args.dropout).to(device)
    if not args.plain:
        model = ap.parallelize(model)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    found: list[float] = []
    for epoch in range(1, args.epochs + 1):
        losses = train(model, device, train_loader, optimizer)
        loss, correct = test(model, device, test_loader)
        if os.environ.get("RANK", "0") == "0":
            print(f"epoch {epoch}: train {losses[-1]:.6f}, test {loss:.6f}, {correct} right")
        found += [*losses, loss, correct]
        scheduler.step()
    return found


if __name__ == "__main__":
    main()
