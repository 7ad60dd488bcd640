// The time limit of a wait on the database.
import { unavailable } from "./failures.ts";

/**
 * The outcome of `promise`, unless `ms` pass first: then `onLate` is called and Fault `unavailable` thrown.
 * What the promise does after that is not looked at.
 */
export function within<T>(ms: number, promise: Promise<T>, onLate: () => void = () => {}): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(
      () => {
        reject(unavailable(new Error(`no answer within ${Math.round(ms)} ms`)));
        onLate();
        // Of a negative time, which is one that has passed, the runtime would warn on standard error.
      },
      Math.max(ms, 0),
    );
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}
