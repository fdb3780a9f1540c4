class PipelineRanks:
    pass
