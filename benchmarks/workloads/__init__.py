"""What benchmarks measure: trainings, their protection and the processes that they run in; and stripes to encode."""
