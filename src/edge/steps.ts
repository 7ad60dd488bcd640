// Runs work that comes in steps: see core/steps.ts.
import { sha256Of } from "../core/digest.ts";
import { named, type Steps } from "../core/steps.ts";
import { doneInTurns } from "./turns.ts";

/**
 * The first step is done at once, since most work has no other, and the rest in turns with all such work.
 *
 * @throws what a step throws
 */
export async function inSteps<T>(steps: Steps<T>, _tenant: string): Promise<T> {
  let step = steps.next();
  if (!step.done) {
    await doneInTurns(() => {
      step = steps.next();
      return !step.done;
    });
  }
  return step.value as T;
}

/** What was found in a body. */
export function scanned<T>(scan: Steps<T>, tenant: string): Promise<T> {
  return inSteps(named("scan of a body", scan), tenant);
}

/** The SHA-256 of a body, in lower hex. */
export function hashOf(body: Uint8Array, tenant: string): Promise<string> {
  return inSteps(named("hash of a body", sha256Of(body)), tenant);
}
