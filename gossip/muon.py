"""Muon for the matrices of the layers (`--optimizer muon`).

Neither paper uses Muon, but with it NoLoCo came nearer to DDP (docs/results.md). Adam divides each
number of a gradient by the noise of that replica's own small batches. Muon makes a matrix's update
orthogonal instead (kellerjordan.github.io/posts/muon).
"""
import torch


def muon(model, beta2=0.95):
    """[Muon for the matrices of a Llama's layers, Adam for all else]: they step together."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [Muon(matrices), torch.optim.Adam(rest, betas=(0.9, beta2), fused=True)]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon without weight decay, with updates as large as Adam's, and fp32 on a CPU.

    torch's own (2.13) always multiplies in bf16. That takes a processor without bf16 arithmetic 2
    to 37 times as long as fp32, and a step of the tiny model then takes up to five times as long as
    Adam's. On a GPU it stays bf16. All ranks on CPUs compute alike, whatever their
    processors.

    params: a list of matrices, or of stacks of matrices (..., rows, columns).
    """

    def __init__(self, params, lr=1e-3, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group["lr"], group["momentum"])

    def move(self, p, lr, momentum):
        """One matrix's step. `buffer` is the running mean of its gradients."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffer = self.state[p]["momentum_buffer"]
        buffer.lerp_(p.grad, 1 - momentum)
        update = orthogonal(p.grad.lerp(buffer, momentum), dtype_for(p.device))
        # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side); Adam's updates
        # have about 0.2 (arXiv 2502.16982).
        p.add_(update, alpha=-lr * 0.2 * max(p.shape[-2:]) ** 0.5)


def dtype_for(device):
    """In which Muon multiplies matrices."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonal(matrix, dtype):
    """About U V^T for a matrix U S V^T, or for each of a stack (..., rows, columns): five
    Newton-Schulz steps, with the numbers of Muon's author.

    Singular values end near 1, most between 0.7 and 1.2, which is enough. The result has this
    dtype.
    """
    rows, columns = matrix.shape[-2:]
    x = matrix.to(dtype).reshape(-1, rows, columns)
    if rows > columns:
        x = x.mT                            # so that the Gram matrices are the small ones
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    if rows > columns:
        x = x.mT
    return x.reshape(matrix.shape)
