"""Taps: where gradients are taken. `tap` is the contract, with the taps of one process; `ddp` and `shards` follow.

A tap copies each final, synchronized gradient to the record's slot, and never raises into the training.
`memckpt.session.gradient_tap` chooses the tap, and replaces one that does not fit.
"""
