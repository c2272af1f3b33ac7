"""What one more token of every row takes from a layer, in as few launches as there can be.

A recorded step costs a few microseconds a launch, whatever is computed. So what a layer does to a
token is two kernels between its products: `heads.py` goes from projections to features and local
attention, `memory.py` from router logits to the input of the output projection. Both move the
states on where they lie, and depend on shapes alone: a CUDA graph can record them. No gradients.
"""
