// Elements at the peak of a training step of a stack of two-stream transformer blocks, per memory mode: "block" counts once
// per block, "stack" once. From its first brace on, this file is JSON. tests/repository/test_memory_calculator.py holds it
// against what MemoryTracker measures.
window.retrogradeMemory = {
  "bytes_per_element": 4,
  "head_width": 64,
  "modes": {
    "store": {
      "colour": "#7d7d7d",
      "block": { "stream": 18, "head": 1, "token": 4 },
      "stack": { "stream": 5, "matrix": 4, "width": 1 }
    },
    "checkpoint": {
      "colour": "#d08c3c",
      "block": { "stream": 2 },
      "stack": { "stream": 20, "head": 1, "token": 4, "matrix": 4 }
    },
    "reverse": {
      "colour": "#2b6cb0",
      "block": {},
      "stack": { "stream": 18, "token": 2, "matrix": 4 }
    }
  },
  "parameters": { "matrix": 12, "width": 9 },
  "copies_of_parameters": 4
}
