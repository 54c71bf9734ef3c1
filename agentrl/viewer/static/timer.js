// Repeats a task until its screen is left. A task that fails is tried again; the screen stays.

export function every(seconds, signal, task) {
  const timer = setInterval(async () => {
    try {
      await task();
    } catch (error) {
      console.warn(error.message);
    }
  }, seconds * 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}
