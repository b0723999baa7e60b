"""SGLang's published kernels as an oracle: fetched, loaded, and compared with ours."""
