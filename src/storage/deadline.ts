// The time limit of a wait on the database.
import { unavailable } from "./failures.ts";

/**
 * The outcome of `promise`, unless `ms` pass first: then `onLate` is called and Fault `unavailable` thrown.
 * What the promise does after that is not looked at.
 */
export function within<T>(ms: number, promise: Promise<T>, onLate: () => void = () => {}): Promise<T> {
  // Of a negative time, which is one that has passed, the runtime would warn on standard error.
  const left = Math.max(ms, 0);
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => {
      reject(unavailable(new Error(`no answer within ${Math.round(left)} ms`)));
      onLate();
    }, left);
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}
