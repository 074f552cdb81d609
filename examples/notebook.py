# %% [markdown]
# A notebook as a script: isobatch from Python. Editors run it cell by cell; `python notebook.py` runs it all.
# The task is that of own_task/. It must be in a file: other processes import it, and the recipe has its hash.

# %%
import isobatch

# The recipe decides what is learnt. Fields that are not given come from the task, as on the command line.
recipe = isobatch.Recipe(task="./own_task/mine.py:Mine", width=64, epochs=5)
print(recipe.hash(), recipe.batch_size, recipe.lr)

# %%
# The plan decides how fast. This is what would happen on another machine; nothing is trained.
plan = isobatch.plan(recipe, hardware="8xh100")
print(plan.processes, plan.strategy, plan.precision)
print(plan.reasons["processes"])

# %%
# Trains here. Called again, it returns the finished run; interrupted, it goes on. Options are those of the
# plan and of the run: micro_batch=4, processes=2, out="runs", name="first", again=True.
run = isobatch.train(recipe, quiet=True)
print(run)

# %%
print(run.metrics["accuracy"], run.summary["train_seconds"])
losses = [row["loss"] for row in run.history if "lr" in row]  # evaluations are rows too, without a rate
print(losses[0], losses[-1])

# %%
# The trained model is a plain torch module.
model = run.model()
print(sum(p.numel() for p in model.parameters()))

# %%
# Redo logged steps in another cut: the same losses.
verification = isobatch.verify(run, steps=2)
print(bool(verification), [step["loss_difference"] for step in verification.steps])

# %%
# Another day, another process.
again = isobatch.load(run.folder)
print(again.status, again.recipe.hash() == recipe.hash())
