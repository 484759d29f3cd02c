"""Where the time goes: sampling, events, analysis, rules and reports of runs.

`from tfbig.profiler import TrainingJob, TimelineCharts` serves notebooks; each name is looked up
when it is asked for, so that the sampler in a training process loads no charts.
"""

_MODULES = {
    "TrainingJob": "training_job",
    "TimelineCharts": "timeline_charts",
    "Heatmap": "heatmap",
    "StepTimelineChart": "step_charts",
    "StepHistogram": "step_charts",
    "MetricsHistogram": "metrics_histogram",
    "MergedTimeline": "merged_timeline",
    "MergeUnit": "merged_timeline",
    "PandasFrame": "pandas_frame",
    "PandasFrameAnalysis": "frame_analysis",
    "StatsBy": "stats_kinds",
    "Resource": "stats_kinds",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
