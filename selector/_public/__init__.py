"""mla-prefill: which attention kernel may prefill an MLA model on this GPU, and why.

    from mla_prefill import MLADimensions, Request, select

    decision = select(Request(dims=MLADimensions(64, 64, 128)))
    print(decision.explain())
"""
