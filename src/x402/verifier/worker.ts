// Entry point of a worker thread: says whose signatures payments carry, a batch per message, and nothing else.
import { checkSignature, type SignedAuthorization } from "../verify.ts";
import type { FromVerifier, Verdict } from "./verifier.ts";

declare const self: Worker;

function answerFor(signed: SignedAuthorization): Verdict {
  try {
    return checkSignature(signed);
  } catch {
    // The main thread tries again, so that its caller gets the error itself.
    return null;
  }
}

function post(message: FromVerifier): void {
  self.postMessage(message);
}

self.onmessage = ({ data }: MessageEvent<readonly SignedAuthorization[]>) => post(data.map(answerFor));

post("ready");
