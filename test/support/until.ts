// For what can't be waited for, such as a row in another process's database.

/** So long that only what never comes takes it, on a busy machine too. */
const MS_MAX = 40_000;
const PAUSE_MS = 10;

/** Resolves when it is so. */
export async function until(isSo: () => boolean | Promise<boolean>, msMax = MS_MAX): Promise<void> {
  const deadline = performance.now() + msMax;
  while (!(await isSo())) {
    if (performance.now() > deadline) throw new Error(`never so: ${isSo}`);
    await Bun.sleep(PAUSE_MS);
  }
}
