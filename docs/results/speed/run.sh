# The measurements of docs/results/speed.md, one thread each; from the folder benchmarks/, with the extra bench installed.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
OUT=../docs/results/speed
python trl_step.py --loss grpo --steps 2 --profile $OUT/profile.txt --output $OUT/trl_grpo.json
python trl_step.py --loss distillation --turns 1 8 --steps 2 --output $OUT/trl_distillation.json
python rows.py --repeats 3 --output $OUT/rows.json
python utilisation.py --output $OUT/utilisation.json
python engine_against_generate.py --output $OUT/engine_against_generate.json
python engine_against_generate.py --turns 8 --latency 0.3 --output $OUT/engine_with_waits.json
python engine_against_generate.py --turns 8 --max-batch 8 --output $OUT/engine_small_batch.json
python generation_by_turns.py --output $OUT/generation_by_turns.json
python host_side.py --output $OUT/host_side.json
python start_up.py --repeats 3 --output $OUT/start_up.json
python loop_blocking.py --output $OUT/loop_blocking.json
