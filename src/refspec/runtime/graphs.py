"""Forwards that are recorded once and replayed: what the host has to do for one is then a few copies.

A decode step is hundreds of small launches, and the GPU is often done with one before the host has made the next. A
CUDA graph is the list of them, recorded once; a replay launches all. It launches them with what they were recorded
with: the same addresses, the same sizes. Four things follow, and they are this file.

1. **Static buffers.** A forward's inputs are copied to where the recorded launches read them. Nothing else may have
   changed since: not the weights' place, not the pool's, not the request table's.
2. **Buckets.** A graph is for one batch size, so only some are recorded (1, 2, 4, 8 ...). A batch takes the smallest
   that holds it; one that is larger than all runs as if there were no graphs.
3. **Padding.** What the bucket has beyond the batch still runs, and reads and writes somewhere: row 0 of the request
   table and slot 0, which belong to nobody. It is written anew for each replay. What the last batch left there are
   slots that may be another request's by now.
4. **Outputs** stand where the recorded launches put them, and the next replay writes there again.

Which forwards? Those with a fixed number of rows for each request: the plain step (1), a draft step (k), the tree (N).
The draft's extend has as many as were accepted, so each request gets S + 1, and those beyond its own are padding too.
A prompt may have any length: prefill is not recorded.

On a CPU there is nothing to record, and `EagerGraph` runs the forward again. It gets the buffers and nothing else, as a
CUDA graph does, so that whoever forgets to fill one, or pads it wrongly, or reads an output too late, sees wrong words
there too.

SGLang records all at start and one graph for the whole draft loop, the choice of branches included. Here a graph is a
forward, and is recorded when it is first needed: what may be recorded can then be read off the batch.

Source: SGLang: python/sglang/srt/model_executor/cuda_graph_runner.py:CudaGraphRunner (replay_prepare is the padding),
python/sglang/srt/speculative/eagle_draft_cuda_graph_runner.py:EAGLEDraftCudaGraphRunner and
eagle_draft_extend_cuda_graph_runner.py:EAGLEDraftExtendCudaGraphRunner @v0.5.5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.kernels.backend import resolve_backend
from refspec.kernels.checks import check_values
from refspec.kernels.launches import launches
from refspec.memory.kv_pool import TokenToKVPool
from refspec.runtime.runner import ModelRunner, RowPadding, ServedModel, lens_of

LARGEST_SIZE = 32  # that is captured unless larger ones are asked for
WARM_UPS = 2

# A forward over static buffers. What it needs beside them does not change.
Body = Callable[[], ForwardOutput]


class CaptureFailed(ValueError):
    """A forward could not be recorded as a CUDA graph."""


def capture_sizes(graphs: bool | Sequence[int] | None, by_default: bool, max_running: int) -> tuple[int, ...]:
    """The batch sizes to capture, ascending; none where there are to be no graphs.

    graphs: False: none. True: the powers of two below max_running, or below 32 if that is less, and then that itself.
    None: as True if by_default, else as False. Or the sizes. Raises ValueError for anything else.
    """
    if graphs is None or isinstance(graphs, bool):
        if not (by_default if graphs is None else graphs):
            return ()
        largest = min(max_running, LARGEST_SIZE)
        return (*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest)
    sizes = list(graphs) if isinstance(graphs, Sequence) and not isinstance(graphs, str) else []
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"graphs is {graphs!r}, it must be True, False, None or batch sizes of at least 1")
    return tuple(sorted(set(sizes)))


@dataclass(frozen=True)
class Shape:
    """What two forwards must have in common, apart from the batch size, to be the same launches."""

    phase: str
    rows: int  # of each request, Q
    tail: int  # columns of its tail, T
    masked: bool  # there is a tail mask
    fed: tuple[int, torch.dtype] | None  # width and type of the hidden states that go in
    chosen: bool  # one row of each request gets logits, that which logits_rows names; else all do


class StaticBuffers:
    """The inputs of all graphs of a shape, with room for the largest batch; that of a smaller size reads the front.

    An entry means what the ForwardBatch's of the same name does; prefix_lens are on the device, i64 (b).
    """

    def __init__(self, shape: Shape, size: int, req_to_token: Tensor) -> None:
        device = req_to_token.device

        def ids(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self.shape, self.req_to_token = shape, req_to_token
        self.input_ids, self.positions, self.out_slots = (ids(size, shape.rows) for _ in range(3))
        self.rows, self.prefix_lens, self.logits_rows = (ids(size) for _ in range(3))
        self.tail_slots = ids(size, shape.tail)
        self.tail_mask = torch.ones(size, shape.rows, shape.tail, dtype=torch.bool, device=device)
        self.hidden_states: Tensor | None = None
        if shape.fed:
            self.hidden_states = torch.zeros(size, shape.rows, shape.fed[0], dtype=shape.fed[1], device=device)

    def fill(self, batch: ForwardBatch, padding: RowPadding, logits_rows: Tensor | None, size: int) -> None:
        """Copy the batch to the front, and write padding behind it, up to `size` requests.

        padding: that of the batch's rows to shape.rows for each request.
        """

        def put(buffer: Tensor, values: Tensor, filling: int = 0) -> None:
            buffer[: padding.batch_size] = values.view(padding.batch_size, *buffer.shape[1:])
            buffer[padding.batch_size : size] = filling

        put(self.input_ids, padding.pad(batch.input_ids))
        put(self.positions, padding.pad(batch.positions))
        put(self.out_slots, padding.pad(batch.out_slots))  # to slot 0
        put(self.rows, batch.rows)  # row 0
        put(self.prefix_lens, lens_of(batch))  # no committed token
        more_rows, more_columns = self.shape.rows - max(batch.q_lens), self.shape.tail - batch.tail_slots.shape[1]
        put(self.tail_slots, F.pad(batch.tail_slots, (0, more_columns)))
        if batch.tail_mask is not None:
            # No row of the batch sees a padded column. A padded row sees something: a softmax over nothing is NaN with
            # many an attention, and would leave NaN in slot 0.
            mask = F.pad(batch.tail_mask, (0, more_columns), value=False)
            put(self.tail_mask, F.pad(mask, (0, 0, 0, more_rows), value=True), filling=True)
        if self.hidden_states is not None:
            assert batch.hidden_states is not None
            put(self.hidden_states, padding.pad(batch.hidden_states))
        if logits_rows is not None:
            put(self.logits_rows, logits_rows if padding.places is None else padding.places[logits_rows])

    def batch(self, size: int) -> ForwardBatch:
        """The buffers as a batch of `size` requests: views, which stay right as the buffers change.

        But for prefix_lens, which on a GPU cannot be known when it is captured: there they are 0, and whoever runs the
        batch has to read the buffer.
        """
        on_cpu = self.prefix_lens.device.type == "cpu"
        return ForwardBatch(
            input_ids=self.input_ids[:size].flatten(),
            positions=self.positions[:size].flatten(),
            out_slots=self.out_slots[:size].flatten(),
            q_lens=[self.shape.rows] * size,
            req_to_token=self.req_to_token,
            rows=self.rows[:size],
            prefix_lens=self.prefix_lens[:size].tolist() if on_cpu else [0] * size,
            tail_slots=self.tail_slots[:size],
            tail_mask=self.tail_mask[:size] if self.shape.masked else None,
            hidden_states=None if self.hidden_states is None else self.hidden_states[:size].flatten(0, 1),
        )


class GraphRunner(ModelRunner):
    """A ModelRunner that replays what it can. Everybody else need not know.

    req_to_token: the request table; a batch over another one runs eagerly.
    sizes: the batch sizes to capture. rows: by phase, how many rows a request has at most; other phases run eagerly.
        Where there are several numbers, a batch takes the smallest that is enough.
    replays, fallbacks: count, by phase, the forwards that were replayed, and those of a phase in `rows` that were not.

    The outputs of a replay are good until this runner's next one. A runner with a shared head runs eagerly: what the
    ranks tell each other in the middle of a forward goes through their hosts. So does one over a pool that is gathered
    (not pool.paged): what is gathered has the sizes of this batch's lengths.
    """

    def __init__(
        self,
        model: ServedModel,
        slots: int,
        device: torch.device,
        forwards: Counter[str],
        vocab_size: int | None,
        page_size: int,
        req_to_token: Tensor,
        sizes: Sequence[int],
        rows: Mapping[str, int | Sequence[int]],
        replays: Counter[str],
        fallbacks: Counter[str],
        pool: TokenToKVPool | None = None,
    ) -> None:
        super().__init__(model, slots, device, forwards, vocab_size, page_size, pool)
        self.req_to_token, self.sizes = req_to_token, sorted(sizes)
        self.rows = {phase: sorted([most] if isinstance(most, int) else most) for phase, most in rows.items()}
        self.replays, self.fallbacks = replays, fallbacks
        self.buffers: dict[Shape, StaticBuffers] = {}
        self.graphs: dict[tuple[Shape, int], CudaGraph | EagerGraph] = {}
        # Where all graphs of this runner work, one after the other
        self.cuda = CudaWorkspace.on(device) if device.type == "cuda" else None
        self.eager_outputs: list[Tensor] = []

    def run(self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None) -> ForwardOutput:
        """By a replay where there is a graph for such a batch, or can be."""
        if phase not in self.rows:
            return self.run_eagerly(batch, phase, logits_rows)
        shape, size = self._shape_of(batch, phase, logits_rows), self._size_for(len(batch.q_lens))
        if shape is None or size is None:
            self.fallbacks[phase] += 1
            return self.run_eagerly(batch, phase, logits_rows)
        self.replays[phase] += 1
        buffers = self._buffers_of(shape)
        padding = RowPadding(batch.q_lens, self.device, shape.rows)
        buffers.fill(batch, padding, logits_rows, size)
        out = self._graph_of(buffers, size).replay()
        return _without_padding(out, padding, logits_rows)

    def _size_for(self, batch_size: int) -> int | None:
        """The smallest captured size that holds the batch."""
        return next((size for size in self.sizes if size >= batch_size), None)

    def _shape_of(self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None) -> Shape | None:
        """That of the batch when its rows are padded; None for one that cannot be brought into a shape."""
        longest, hidden = max(batch.q_lens), batch.hidden_states
        rows = next((rows for rows in self.rows[phase] if rows >= longest), None)
        if (
            rows is None
            or self.shared_head is not None
            or not self.pool.paged
            or batch.req_to_token is not self.req_to_token
            or (self.cuda and resolve_backend("auto", self.device) != "triton")
            or (batch.tail_mask is None and min(batch.q_lens) < rows)
            or (logits_rows is not None and len(logits_rows) != len(batch.q_lens))
        ):
            return None
        return Shape(
            phase,
            rows,
            batch.tail_slots.shape[1] + rows - longest,  # each padded row has a column of its own, as every row has
            batch.tail_mask is not None,
            None if hidden is None else (hidden.shape[1], hidden.dtype),
            logits_rows is not None,
        )

    def _buffers_of(self, shape: Shape) -> StaticBuffers:
        if shape not in self.buffers:
            self.buffers[shape] = StaticBuffers(shape, self.sizes[-1], self.req_to_token)
        return self.buffers[shape]

    def _graph_of(self, buffers: StaticBuffers, size: int) -> CudaGraph | EagerGraph:
        shape = buffers.shape
        if (shape, size) not in self.graphs:
            body = self._body(buffers, size)
            try:
                graph = CudaGraph(body, self.cuda) if self.cuda else EagerGraph(body, self.eager_outputs)
            except RuntimeError as error:  # torch's errors of CUDA, and of memory that ran out, are such
                cause = error.__context__ or error  # that of ending the capture says nothing
                raise CaptureFailed(
                    f"the {shape.phase} forward of a batch of {size} could not be captured as a CUDA graph "
                    f"({(str(cause).strip() or type(cause).__name__).splitlines()[0]}): graphs=False does without"
                ) from error
            self.graphs[shape, size] = graph
        return self.graphs[shape, size]

    def _body(self, buffers: StaticBuffers, size: int) -> Body:
        """The forward that reads the buffers, and keeps hold of nothing else that may change."""
        lens = buffers.prefix_lens[:size]
        logits_rows = buffers.logits_rows[:size] if buffers.shape.chosen else None

        def body() -> ForwardOutput:
            return self.run_eagerly(buffers.batch(size), buffers.shape.phase, logits_rows, lens)

        return body


class EagerGraph:
    """What stands in for a CUDA graph where there is none: the forward runs again.

    outputs: those of the last replay of any graph that shares them. They are lost when the next begins. A GPU would not
    always overwrite them, but it may; here they become NaN.
    """

    def __init__(self, body: Body, outputs: list[Tensor]) -> None:
        self.body, self.outputs = body, outputs

    def replay(self) -> ForwardOutput:
        """Run it over what the buffers now hold."""
        for output in self.outputs:
            output.fill_(torch.nan)
        out = self.body()
        self.outputs[:] = out.logits, out.hidden_states
        return out


@dataclass(frozen=True)
class CudaWorkspace:
    """What graphs that never run at the same time may share: memory for intermediate results and outputs."""

    device: torch.device
    stream: torch.cuda.Stream  # that they are recorded on
    pool: Any  # torch's name for the memory

    @classmethod
    def on(cls, device: torch.device) -> CudaWorkspace:
        """A new one."""
        return cls(device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


class CudaGraph:
    """A forward's launches, recorded. Raises RuntimeError if it does what cannot be: wait for the device, say."""

    def __init__(self, body: Body, workspace: CudaWorkspace) -> None:
        counted, stream = launches.copy(), workspace.stream
        with torch.cuda.device(workspace.device), check_values(False):  # looking at values is waiting for the device
            current = torch.cuda.current_stream()
            try:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):  # kernels get compiled, libraries their workspaces: not while recording
                        body()
                before = launches.copy()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, pool=workspace.pool, stream=stream):
                    self.out = body()
                self.launches = launches - before
                current.wait_stream(stream)
            finally:
                torch.cuda.set_stream(current)  # torch leaves the other one where recording fails
                launches.clear()  # none of these was asked for by anybody
                launches.update(counted)

    def replay(self) -> ForwardOutput:
        """Launch all of it, over what the buffers now hold. The outputs stand where they stood the last time."""
        self.graph.replay()
        launches.update(self.launches)
        return self.out


def _without_padding(out: ForwardOutput, padding: RowPadding, logits_rows: Tensor | None) -> ForwardOutput:
    """The outputs of the batch's own rows."""
    rows = padding.batch_size * padding.rows
    logits = padding.unpad(out.logits[:rows]) if logits_rows is None else out.logits[: padding.batch_size]
    return ForwardOutput(logits, padding.unpad(out.hidden_states[:rows]))
