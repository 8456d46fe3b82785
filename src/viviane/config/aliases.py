"""Names of settings in other libraries, for the suggestions in errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from viviane.core.errors import nearest, suggest

# lower-case name in other libraries without "_" -> names here; the first one that the settings have is suggested
_ELSEWHERE: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("learningrate", "baselr", "eta", "stepsize", "alpha"), ("lr",)),
    **dict.fromkeys(("bs", "batchsize", "trainbatchsize", "batchsizetrain"), ("batch_size",)),
    **dict.fromkeys(("batchsizeeval", "validbatchsize", "testbatchsize"), ("eval_batch_size",)),
    **dict.fromkeys(("numepochs", "nepochs", "maxepochs", "epoch", "trainepochs"), ("epochs",)),
    **dict.fromkeys(("maxiter", "numsteps", "totalsteps", "maxiterations", "numiterations"), ("max_steps",)),
    **dict.fromkeys(("evalinterval", "evalsteps", "evalfreq", "valcheckinterval"), ("eval_every",)),
    **dict.fromkeys(("maxevalbatches", "evalbatches", "limitvalbatches"), ("max_eval_batches",)),
    **dict.fromkeys(("snapshot", "savesteps", "saveevery", "checkpointinterval"), ("checkpoint_every",)),
    **dict.fromkeys(("savetotallimit", "maxtokeep"), ("keep_checkpoints",)),
    **dict.fromkeys(("earlystopping", "earlystoppingrounds", "earlystoppatience"), ("patience",)),
    **dict.fromkeys(("loadbestmodelatend", "restorebestweights"), ("restore_best",)),
    **dict.fromkeys(("gradientclipval", "clipnorm", "maxgradnorm", "gradclip", "globalclipnorm"), ("clip_grad_norm",)),
    **dict.fromkeys(("amp", "mixedprecision", "usemixedprecision", "fp16", "bf16"), ("precision",)),
    **dict.fromkeys(("scaler", "lossscaling"), ("loss_scale",)),
    **dict.fromkeys(("randomstate", "randomseed", "rngseed"), ("seed",)),
    **dict.fromkeys(("classweight", "scaleposweight", "posweight"), ("class_weights",)),
    **dict.fromkeys(("njobs", "numworkers", "nthreads"), ("num_threads", "threads")),
    **dict.fromkeys(("accelerator", "gpu", "cuda", "usegpu"), ("device",)),
    **dict.fromkeys(("warmup", "numwarmupsteps", "warmupiters"), ("warmup_steps",)),
    **dict.fromkeys(("usecudagraph", "cudagraphs"), ("cuda_graph",)),
    **dict.fromkeys(("beta", "betas", "momentum1"), ("beta1",)),
    **dict.fromkeys(("eps", "adagradeps"), ("epsilon",)),
    **dict.fromkeys(("l2", "l2reg", "wd", "decoupledweightdecay", "embeddingregularizer"), ("weight_decay",)),
    **dict.fromkeys(("initialaccumulatorvalue", "initaccumulatorvalue"), ("initial_accumulator",)),
    **dict.fromkeys(("rho", "smoothing"), ("decay", "label_smoothing")),
    **dict.fromkeys(("momentumfactor",), ("momentum",)),
    **dict.fromkeys(("embeddingdim", "embeddingsize", "embdim", "embeddingvecsize", "evsize"), ("dim",)),
    **dict.fromkeys(("vocabsize", "vocabularysize", "numembeddings", "cardinality", "featuredim"), ("num_ids", "rows")),
    **dict.fromkeys(("maxlen", "maxlength", "maxseqlen", "sequencelength"), ("max_length", "last")),
    **dict.fromkeys(("sep", "delim"), ("delimiter", "separator")),
    **dict.fromkeys(("minfreq", "mincount", "freqthreshold", "minfrequency"), ("min_count",)),
}


def suggest_setting(name: str, known: Collection[str]) -> str:
    """Return a suggestion: the setting with the nearest spelling, or the equivalent of another library's name.

    Example:
        >>> suggest_setting("learning_rate", ["batch_size", "lr"])
        "did you mean 'lr'?"
        >>> suggest_setting("batch_sise", ["batch_size", "lr"])
        "did you mean 'batch_size'?"
    """
    meant = setting_meant(name, known)
    return suggest(name, known) if meant is None else f"did you mean {meant!r}?"


def setting_meant(name: str, known: Collection[str]) -> str | None:
    """Return the setting that is almost spelt so, or another library calls so; None if there is none.

    Example:
        >>> setting_meant("learning_rate", ["batch_size", "lr"]), setting_meant("rows", ["batch_size", "lr"])
        ('lr', None)
    """
    for alias in _ELSEWHERE.get(name.lower().replace("_", "").replace("-", ""), ()):
        if alias in known:
            return alias
    return nearest(name, known)
