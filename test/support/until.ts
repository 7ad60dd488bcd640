// For what can't be waited for, such as a row in another process's database.

/** So long that only what never comes takes it, on a busy machine too. */
const MS_MAX = 80_000;
/** Looks are far between where much has been waited already: each may cost a request and a query. */
const [PAUSE_MS_MIN, PAUSE_MS_MAX, PAUSE_PART] = [5, 150, 10];

/** Resolves when it is so. */
export async function until(isSo: () => boolean | Promise<boolean>, msMax = MS_MAX): Promise<void> {
  const began = performance.now();
  while (!(await isSo())) {
    const waited = performance.now() - began;
    if (waited > msMax) throw new Error(`never so: ${isSo}`);
    await Bun.sleep(Math.min(Math.max(waited / PAUSE_PART, PAUSE_MS_MIN), PAUSE_MS_MAX));
  }
}
